// Light, dark, or as the system says. The choice stays in this browser.

const KEY = "bftrainer.theme";
const ORDER = ["auto", "light", "dark"];

function stored() {
  try {
    const found = localStorage.getItem(KEY);
    return ORDER.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}

function applyTheme(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
}

export function isDark() {
  const choice = document.documentElement.dataset.theme;
  return choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function addThemeSwitch(button, changed) {
  const show = () => {
    button.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[stored()];
    button.setAttribute("aria-label", `Colours: ${stored()}. Press to change.`);
  };
  button.addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(stored()) + 1) % ORDER.length];
    try { localStorage.setItem(KEY, next); } catch { /* a page opened from a file may keep nothing */ }
    applyTheme(next);
    show();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  show();
}

applyTheme(stored());
