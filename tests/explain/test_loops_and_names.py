"""Loops and names of plain scripts: what is given to prepare, under which name, and which loops change."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.explained import after, changed, explain_text, noticed

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

"""


def prepared(explanation_changes: list[tuple[int, str | None]]) -> str:
    """The arguments that prepare is given."""
    line = next(text for _, text in explanation_changes if text and "elastic.prepare(" in text)
    return line.partition("elastic.prepare(")[2].removesuffix(")")


def test_a_loader_made_in_the_header_of_the_loop_gets_a_name(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        HEAD
        + """\
model = nn.Linear(1, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x in DataLoader(data, batch_size=4):
        model(x).mean().backward()
        opt.step()
""",
    )
    assert after(explanation, tmp_path)["train.py"][7:11] == [
        "train_loader = DataLoader(data, batch_size=4)",
        "model, opt, train_loader = elastic.prepare(model, opt, train_loader)",
        "for epoch in elastic.epochs(3):",
        "    for x in train_loader:",
    ]


def test_globals_that_a_function_trains_are_prepared_where_they_are_made(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        HEAD
        + """\
model = nn.Linear(1, 1)
loader = DataLoader(data)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def main():
    for epoch in range(3):
        for x in loader:
            model(x).mean().backward()
            optimizer.step()


main()
""",
    )
    assert (8, "model, optimizer, loader = elastic.prepare(model, optimizer, loader)") in changed(explanation)
    after(explanation, tmp_path)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("params = list(a.parameters()) + list(b.parameters())\nopt = torch.optim.Adam(params)", "a, b, opt, loader"),
        (
            "opt = torch.optim.Adam([{'params': a.body.parameters()}, {'params': a.head.parameters()}])",
            "a, opt, loader",
        ),
        ("opt = make(a)", "a, opt, loader"),
        ("opt = Lion(filter(lambda p: p.requires_grad, a.parameters()))", "a, opt, loader"),
        ("opts = [torch.optim.Adam(a.parameters())]\nopt = opts[0]", "a, opt, loader"),
    ],
)
def test_modules_are_those_that_the_optimizer_trains(tmp_path: Path, made: str, expected: str) -> None:
    text = f"""\
def make(net):
    return torch.optim.Adam(net.parameters())


a, b = nn.Linear(1, 1), nn.Linear(1, 1)
teacher = nn.Linear(1, 1)
loader = DataLoader(data)
{made}
for epoch in range(3):
    for x in loader:
        (b(a(x)) - teacher(x)).mean().backward()
        opt.step()
"""
    assert prepared(changed(explain_text(tmp_path, HEAD + text))) == expected


def test_a_list_of_optimizers_is_prepared_one_by_one(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        HEAD
        + """\
a, b = nn.Linear(1, 1), nn.Linear(1, 1)
opt_a = torch.optim.Adam(a.parameters())
opt_b = torch.optim.Adam(b.parameters())
loader = DataLoader(data)
for epoch in range(3):
    for x in loader:
        b(a(x)).mean().backward()
        for opt in [opt_a, opt_b]:
            opt.step()
""",
    )
    assert prepared(changed(explanation)) == "a, b, opt_a, opt_b, loader"


def test_a_moving_average_and_a_plateau_scheduler_are_prepared_too(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        HEAD
        + """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
ema = torch.optim.swa_utils.AveragedModel(net)
loader = DataLoader(data)
for epoch in range(3):
    for x in loader:
        net(x).mean().backward()
        optimizer.step()
        ema.update_parameters(net)
    plateau.step(validate(net))
""",
    )
    assert prepared(changed(explanation)) == "net, optimizer, loader, plateau, ema"


def test_a_loop_of_steps_over_range_becomes_steps(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        HEAD
        + """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
for it in range(1000):
    x = sample_batch(32)
    net(x).mean().backward()
    optimizer.step()
""",
    )
    assert changed(explanation)[1:] == [
        (7, "net, optimizer = elastic.prepare(net, optimizer)"),
        (7, "for it in elastic.steps(1000):"),
    ]
    assert explanation.notices == ()


@pytest.mark.parametrize(
    ("header", "end", "wanted"),
    [
        ("while it < n:", "it += 1", "for it in elastic.steps(n):"),
        ("while it <= n:", "it += 1", "for it in elastic.steps(n + 1):"),
        ("while True:", "it += 1\n    if it >= n:\n        break", "for it in elastic.steps(n):"),
        ("while True:", "it += 1\n    if it > n:\n        break", "for it in elastic.steps(n + 1):"),
    ],
)
def test_a_while_loop_with_a_counter_becomes_as_many_steps(tmp_path: Path, header: str, end: str, wanted: str) -> None:
    text = f"""\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
it, n = 0, 100
{header}
    net(get_batch()).mean().backward()
    optimizer.step()
    {end}
"""
    explanation = explain_text(tmp_path, HEAD + text.replace("it, n = 0, 100", "it = 0"))
    lines = after(explanation, tmp_path)["train.py"]
    assert wanted in lines
    assert not any("it += 1" in line or "break" in line for line in lines)
    assert explanation.notices == ()


MADE = """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
loader = DataLoader(data)
it = 0
"""
A_STEP = "net(get_batch()).mean().backward(); optimizer.step()"
AN_EPOCH = "for x in loader: net(x).mean().backward(); optimizer.step()"


@pytest.mark.parametrize(("work", "function"), [(A_STEP, "elastic.steps(n)"), (AN_EPOCH, "elastic.epochs(n)")])
@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("while True:", "it += 1\n    if it > 100:\n        break\n    WORK"),  # one pass fewer than range(100 + 1)
        ("while it < 100:", "it += 1\n    rate = 0.1 / it\n    WORK"),  # the number begins at 1
        ("while it < 100:", "WORK\n    it += 1\n    log(it)"),
        ("while it < 100:", "WORK\n    if bad():\n        it = 0\n    it += 1"),
        ("while it < 100:", "WORK\n    if bad():\n        continue\n    it += 1"),
        ("while it < 100:", "WORK\n    it += 1\nprint(it)"),
    ],
)
def test_a_while_loop_that_uses_its_counter_in_another_way_is_not_rewritten(
    tmp_path: Path, work: str, function: str, header: str, body: str
) -> None:
    explanation = explain_text(tmp_path, f"{HEAD}{MADE}{header}\n    {body.replace('WORK', work)}\n")
    lines = after(explanation, tmp_path)["train.py"]
    assert header in lines
    assert [function in one.remedy for one in explanation.refused] == [True]
    assert not any("carry" in line for line in lines)


@pytest.mark.parametrize(
    "body",
    [
        "it += 1\n    WORK",
        "for x in data:\n        if bad(x):\n            continue\n    WORK\n    it += 1",
        "WORK\n    log(it)\n    it += 1\n    if bad():\n        continue",
    ],
)
def test_a_while_loop_that_counts_in_a_harmless_place_becomes_steps(tmp_path: Path, body: str) -> None:
    explanation = explain_text(tmp_path, f"{HEAD}{MADE}while it < 100:\n    {body.replace('WORK', A_STEP)}\n")
    assert "for it in elastic.steps(100):" in after(explanation, tmp_path)["train.py"]
    assert explanation.refused == ()


@pytest.mark.parametrize(
    ("header", "end"), [("while it < 100:", "it += 1"), ("while True:", "it += 1\n    if it >= 100:\n        break")]
)
def test_a_count_of_bad_passes_that_ends_the_loop_is_carried(tmp_path: Path, header: str, end: str) -> None:
    patience = "bad += 1\n    if improved():\n        bad = 0\n    if bad > 5:\n        break"
    text = f"{HEAD}{MADE}bad = 0\n{header}\n    {A_STEP}\n    {patience}\n    {end}\n"
    lines = after(explain_text(tmp_path, text), tmp_path)["train.py"]
    assert any('carry="bad"' in line for line in lines), lines


def test_only_the_counter_of_the_steps_is_known_to_a_newcomer(tmp_path: Path) -> None:
    text = """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
it = 0
good = 0
while it < 100:
    net(get_batch()).mean().backward()
    optimizer.step()
    good += 1
    it += 1
print(good)
"""
    explanation = explain_text(tmp_path, HEAD + text)
    assert (9, 'net, optimizer = elastic.prepare(net, optimizer, carry="good")') in changed(explanation)
    assert explanation.notices == ()


def test_a_while_loop_whose_steps_are_not_counted_is_refused(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        HEAD
        + """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
while loss > 0.1:
    net(get_batch()).mean().backward()
    optimizer.step()
""",
    )
    assert "elastic.steps" in noticed(explanation.refused)[7]


def test_full_batches_and_next_are_told(tmp_path: Path) -> None:
    text = """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
batches = iter(DataLoader(data))
for it in range(1000):
    {fetch}
    net(x).mean().backward()
    optimizer.step()
"""
    whole = explain_text(tmp_path, HEAD + text.format(fetch="x = X"))
    assert "all data" in noticed(whole.warnings)[8]
    by_next = explain_text(tmp_path, HEAD + text.format(fetch="x = next(batches)"))
    assert "next()" in noticed(by_next.warnings)[9]


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("range(3)", "for epoch in elastic.epochs(3):"),
        ("range(0, args.n)", "for epoch in elastic.epochs(args.n):"),
        ("trange(2 * 3)", "for epoch in elastic.epochs(2 * 3):"),
        ("tqdm(range(3))", "for epoch in tqdm(elastic.epochs(3)):"),
        ("range(1, 4)", "for epoch in elastic.epochs(1, 4):"),
        ("range(start, 4)", "for epoch in elastic.epochs(start, 4):"),
        ("range(0, 9, 3)", None),
    ],
)
def test_a_range_becomes_epochs_unless_it_has_a_step(tmp_path: Path, header: str, wanted: str | None) -> None:
    text = f"""\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
loader = DataLoader(data)
for epoch in {header}:
    for x in loader:
        net(x).mean().backward()
        optimizer.step()
"""
    explanation = explain_text(tmp_path, HEAD + text)
    assert [text for line, text in changed(explanation) if line == 8][1:] == ([wanted] if wanted else [])
    assert (8 in noticed(explanation.warnings)) == (wanted is None)


COUNTED = """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
loader = DataLoader(data)
best, epoch = 0.0, 0
while epoch < 8:
    for x in loader:
        net(x).mean().backward()
        optimizer.step()
    best = max(best, evaluate(net))
    epoch += 1
"""


def test_a_while_loop_over_epochs_becomes_epochs_and_its_counter_is_not_carried(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, HEAD + COUNTED)
    text = "\n".join(after(explanation, tmp_path)["train.py"])
    assert "for epoch in elastic.epochs(8):" in text
    assert "epoch += 1" not in text
    assert 'carry="best"' in text


def test_a_while_loop_over_epochs_that_cannot_be_rewritten_is_refused(tmp_path: Path) -> None:
    for text in (f"{COUNTED}print(epoch)\n", COUNTED.replace("epoch += 1", "epoch += 2")):
        explanation = explain_text(tmp_path, HEAD + text)
        refused = explanation.refused
        assert ["elastic.epochs(n)" in one.remedy for one in refused] == [True]
        carried = [line for line in after(explanation, tmp_path).get("train.py", []) if "carry" in line]
        assert all("epoch" not in line.partition("carry")[2] for line in carried)


def test_an_epoch_loop_that_is_no_range_is_left_with_a_word(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        HEAD
        + """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
loader = DataLoader(data)
while not stopped():
    for x in loader:
        net(x).mean().backward()
        optimizer.step()
""",
    )
    assert "elastic.epochs" in noticed(explanation.warnings)[8]
    assert [line for line, _ in changed(explanation)] == [4, 8]


def test_a_script_whose_loop_is_elsewhere_has_a_way_without_lines(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        """\
        import torch

        def step(model, optimizer, x):
            model(x).mean().backward()
            optimizer.step()
        """,
    )
    assert explanation.way == "prepare"
    assert explanation.changes == ()
    assert "was not found" in noticed(explanation.warnings)[4]


def test_an_environment_that_is_stepped_is_no_optimizer(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, "while True:\n    env.step(action)\n    loss.backward()\n")
    assert explanation.way == "none"


def test_gradients_without_an_optimizer_are_told(tmp_path: Path) -> None:
    text = "while True:\n    loss.backward()\n    for p in model.parameters():\n        p.data -= 0.1 * p.grad\n"
    explanation = explain_text(tmp_path, text)
    assert explanation.way == "none"
    assert "torch.optim" in noticed(explanation.warnings)[2]


def test_an_endless_count_of_episodes_needs_a_number(tmp_path: Path) -> None:
    text = """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
for episode in itertools.count(1):
    net(sample_batch()).mean().backward()
    optimizer.step()
"""
    assert "elastic.steps(n)" in noticed(explain_text(tmp_path, HEAD + text).refused)[7]


def test_what_comes_from_elsewhere_is_assumed_to_be_a_loader_and_told(tmp_path: Path) -> None:
    text = """\
net = nn.Linear(1, 1)
optimizer = torch.optim.Adam(net.parameters())
train_iter, test_iter = library.load_data(32)
for epoch in range(3):
    for x in train_iter:
        net(x).mean().backward()
        optimizer.step()
"""
    explanation = explain_text(tmp_path, HEAD + text)
    assert prepared(changed(explanation)) == "net, optimizer, train_iter"
    assert "assumed to be a DataLoader" in noticed(explanation.warnings)[9]
    cut = explain_text(tmp_path, HEAD + text.replace("library.load_data(32)", "torch.rand(2, 9)"))
    assert "DataLoader" in noticed(cut.refused)[9]
