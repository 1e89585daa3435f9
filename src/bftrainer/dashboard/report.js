// A finished simulation: the same pictures as the live page, from data that stands in the page itself.

{
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const hits = {};
  const draw = () => {
    if (data.pool) hits.pool = drawPool($("pool-canvas"), data.pool, { utc: true, height: 240, labels: true });
    if (data.gantt) {
      hits.gantt = drawGantt($("gantt-canvas"), data.gantt, { utc: true });
      drawLegend($("gantt-legend"), data.gantt);
    }
  };
  for (const name of ["pool", "gantt"]) {
    const canvas = $(`${name}-canvas`);
    if (canvas && data[name]) addTip(canvas, canvas.parentElement.querySelector(".tip"), () => hits[name]);
  }
  addThemeSwitch($("theme"), draw);
  let due = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(due);
    due = requestAnimationFrame(draw);
  }).observe(document.querySelector("main"));
}
