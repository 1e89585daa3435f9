"""Lines of a training loop that BFTrainer refuses or that need a word: each is found with its line and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.explained import after, changed, explain_text, noticed

LOOP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Linear(8, 1)
{before}
optimizer = torch.optim.{optimizer}
loader = DataLoader({loader})
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = {loss}
        {backward}
        {step}
"""
"""Its loss is in line 11, its step in line 13."""
USUAL = {
    "before": "limit = 1.0",
    "optimizer": "SGD(model.parameters(), lr=0.1)",
    "loader": "data, batch_size=4, shuffle=True",
    "loss": "nn.functional.mse_loss(model(x), y)",
    "backward": "loss.backward()",
    "step": "optimizer.step()",
}


def loop(**parts: str) -> str:
    return LOOP.format(**(USUAL | parts))


def test_a_usual_loop_has_nothing_to_look_at(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, loop())
    assert explanation.way == "prepare"
    assert explanation.notices == ()
    assert after(explanation, tmp_path)["train.py"][8:11] == [
        "loader = DataLoader(data, batch_size=4, shuffle=True)",
        "model, optimizer, loader = elastic.prepare(model, optimizer, loader)",
        "for epoch in elastic.epochs(3):",
    ]


@pytest.mark.parametrize(
    "loss",
    [
        'nn.functional.mse_loss(model(x), y, reduction="sum")',
        "((model(x) - y) ** 2).sum()",
        "torch.sum((model(x) - y) ** 2)",
        'nn.MSELoss(reduction="sum")(model(x), y)',
        "0.5 * ((model(x) - y) ** 2).sum() + model.weight.abs().mean()",
    ],
)
def test_a_summed_loss_is_refused(tmp_path: Path, loss: str) -> None:
    assert "must be a mean" in noticed(explain_text(tmp_path, loop(loss=loss)).refused)[11]


@pytest.mark.parametrize(
    "loss",
    [
        "((model(x) - y) ** 2).sum(1).mean()",
        "((model(x) - y) ** 2).sum() / len(x)",
        "torch.sum((model(x) - y) ** 2, dim=1).mean()",
        "nn.MSELoss()(model(x), y)",
        "sum([nn.functional.mse_loss(model(x), y), model.weight.abs().mean()])",
        "nn.functional.mse_loss(model(x), y) + 0.1 * model.weight.pow(2).sum()",
        "nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)",
    ],
)
def test_a_mean_is_not(tmp_path: Path, loss: str) -> None:
    assert explain_text(tmp_path, loop(loss=loss)).notices == ()


@pytest.mark.parametrize(
    "loss",
    [
        "(y * (model(x) - y) ** 2).sum() / y.sum().clamp(min=1)",
        "(y * (model(x) - y) ** 2).sum() / torch.count_nonzero(y)",
        "nn.functional.cross_entropy(model(x), y, ignore_index=-1)",
        "nn.CrossEntropyLoss(weight=limits)(model(x), y)",
    ],
)
def test_a_mean_over_something_else_than_samples_is_told(tmp_path: Path, loss: str) -> None:
    explanation = explain_text(tmp_path, loop(loss=loss))
    assert explanation.refused == ()
    assert "not a mean over the samples" in noticed(explanation.notices)[11]


def test_a_criterion_that_sums_is_found_where_it_is_made(tmp_path: Path) -> None:
    text = loop(before='criterion = nn.BCELoss(reduction="sum")', loss="criterion(model(x), y)")
    assert set(noticed(explain_text(tmp_path, text).refused)) == {6}


def test_a_sum_that_is_divided_later_is_a_mean_but_accumulation_does_not_make_it_one(tmp_path: Path) -> None:
    summed = 'nn.functional.mse_loss(model(x), y, reduction="sum")'
    assert explain_text(tmp_path, loop(loss=f"{summed}; loss = loss / len(x)")).refused == ()
    assert set(noticed(explain_text(tmp_path, loop(loss=f"{summed}; loss = loss / accumulation")).refused)) == {11}


def test_lbfgs_is_refused(tmp_path: Path) -> None:
    text = loop(
        optimizer="LBFGS(model.parameters())",
        backward="def closure():\n            loss.backward()\n            return loss",
        step="optimizer.step(closure)",
    )
    refused = noticed(explain_text(tmp_path, text).refused)
    assert set(refused) == {7}
    assert "LBFGS" in refused[7]


def test_a_closure_of_another_optimizer_is_computed_once_and_fine(tmp_path: Path) -> None:
    text = loop(
        backward="def closure():\n            loss.backward()\n            return loss", step="optimizer.step(closure)"
    )
    explanation = explain_text(tmp_path, text)
    assert explanation.way == "prepare"
    assert explanation.notices == ()


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ("data, batch_sampler=BucketBatchSampler(data)", "BucketBatchSampler"),
        ("Stream(), batch_size=4", "stream"),
        ('load_dataset("c4", streaming=True), batch_size=4', "stream"),
    ],
)
def test_data_whose_order_is_not_ours_is_refused(tmp_path: Path, loader: str, said: str) -> None:
    before = "class Stream(torch.utils.data.IterableDataset): pass"
    refused = noticed(explain_text(tmp_path, loop(before=before, loader=loader)).refused)
    assert set(refused) == {8}
    assert said in refused[8]


@pytest.mark.parametrize(
    ("sampler", "said"),
    [("torch.utils.data.WeightedRandomSampler(weights, 100)", "WeightedRandomSampler"), ("limit", "limit")],
)
def test_an_own_sampler_is_told_what_it_must_do(tmp_path: Path, sampler: str, said: str) -> None:
    explanation = explain_text(tmp_path, loop(loader=f"data, sampler={sampler}"))
    assert explanation.refused == ()
    assert f"the sampler {said} must draw the same" in noticed(explanation.warnings)[8]


@pytest.mark.parametrize("loader", ["data, sampler=None", "data, sampler=torch.utils.data.RandomSampler(data)"])
def test_usual_samplers_are_not(tmp_path: Path, loader: str) -> None:
    assert explain_text(tmp_path, loop(loader=loader)).notices == ()


def test_data_parallel_is_a_warning(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, loop(before="model = nn.DataParallel(model)"))
    assert explanation.refused == ()
    assert "one process per GPU" in noticed(explanation.warnings)[6]


def test_sync_batch_norm_is_a_warning(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, loop(before="model = nn.SyncBatchNorm.convert_sync_batchnorm(model)"))
    assert explanation.refused == ()
    assert "CPU" in noticed(explanation.warnings)[6]


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        ("if (i + 1) % 4 == 0:\n            optimizer.step()", "if (i + 1) % 4 == 0 or i + 1 == len(loader):"),
        ("if not (i + 1) % 4:\n            optimizer.step()", "if not (i + 1) % 4 or i + 1 == len(loader):"),
        (
            "if (i + 1) % 4 != 0:\n            continue\n        optimizer.step()",
            "if (i + 1) % 4 != 0 and i + 1 != len(loader):",
        ),
    ],
)
def test_accumulation_without_a_last_step_is_refused_and_changed(tmp_path: Path, step: str, wanted: str) -> None:
    explanation = explain_text(tmp_path, loop(step=step))
    assert set(noticed(explanation.refused)) == {13}
    assert wanted in noticed(explanation.refused)[13]
    assert (13, wanted) in changed(explanation)
    after(explanation, tmp_path)


@pytest.mark.parametrize(
    "step",
    [
        "if (i + 1) % 4 == 0 or i + 1 == len(loader):\n            optimizer.step()",
        "if i % 5 == 0:\n            loss.backward()\n            optimizer.step()",  # a critic
        "optimizer.step()\n        if i % 10 == 0:\n            print(loss.item())",
    ],
)
def test_other_tests_of_the_batch_number_are_not(tmp_path: Path, step: str) -> None:
    assert explain_text(tmp_path, loop(step=step)).refused == ()


@pytest.mark.parametrize(
    "change",
    [
        "for p in model.parameters(): p.grad *= 0.5",
        "for p in model.parameters(): p.grad.data.clamp_(-limit, limit)",
        "model.weight.grad = model.weight.grad * mask",
    ],
)
def test_gradients_changed_by_hand_need_a_synchronize(tmp_path: Path, change: str) -> None:
    found = explain_text(tmp_path, loop(step=f"{change}\n        optimizer.step()"))
    assert found.refused == ()
    assert "optimizer.synchronize()" in noticed(found.warnings)[13]
    done = explain_text(tmp_path, loop(step=f"optimizer.synchronize()\n        {change}\n        optimizer.step()"))
    assert done.notices == ()


@pytest.mark.parametrize(
    "step", ["model.weight.grad = None", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "model.bias.grad.zero_()"]
)
def test_clipping_and_clearing_gradients_do_not(tmp_path: Path, step: str) -> None:
    assert explain_text(tmp_path, loop(step=f"{step}\n        optimizer.step()")).notices == ()


@pytest.mark.parametrize(
    "seed",
    [
        "torch.manual_seed(1 + rank)",
        'seed = int(os.environ["RANK"]) + 7; torch.manual_seed(seed)',
        "np.random.seed(run.rank)",
    ],
)
def test_a_seed_by_rank_is_a_warning(tmp_path: Path, seed: str) -> None:
    assert "numbered anew" in noticed(explain_text(tmp_path, loop(before=seed)).warnings)[6]


def test_a_plain_seed_is_not(tmp_path: Path) -> None:
    assert explain_text(tmp_path, loop(before="torch.manual_seed(frank)")).warnings == ()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('open("log.txt", "a").write("x")', True),
        ('plt.savefig("loss.png")', True),
        ('Path("x").open("w")', True),
        ('open("log.txt")', False),
        ("torch.save(model.state_dict(), 'm.pt')", False),
        ('if rank == 0: open("log.txt", "a").write("x")', False),
    ],
)
def test_files_that_all_ranks_write_are_warnings(tmp_path: Path, line: str, expected: bool) -> None:
    warnings = noticed(explain_text(tmp_path, loop(step=f"optimizer.step()\n        {line}")).warnings)
    assert (14 in warnings) == expected


def test_a_file_is_followed_into_functions_and_a_guard_around_their_call_counts(tmp_path: Path) -> None:
    before = "def note(x):\n    open('log.txt', 'a').write(str(x))"
    bare = explain_text(tmp_path, loop(before=before, step="optimizer.step(); note(loss)"))
    assert "all ranks" in noticed(bare.warnings)[7]
    guard = "optimizer.step()\n        if is_main: note(loss)"
    assert explain_text(tmp_path, loop(before=before, step=guard)).warnings == ()


def test_objects_that_are_made_within_the_loop_are_refused(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        """\
        import torch
        from torch.utils.data import DataLoader

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            loader = DataLoader(data[epoch])
            for x in loader:
                model(x).mean().backward()
                optimizer.step()
        """,
    )
    assert "made again" in noticed(explanation.refused)[7]
    assert (6, "model, optimizer = elastic.prepare(model, optimizer)") in changed(explanation)


def test_a_loop_around_the_training_and_a_second_training_are_told(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        """\
        import torch
        from torch.utils.data import DataLoader

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(data)
        for fold in range(5):
            for epoch in range(3):
                for x in loader:
                    model(x).mean().backward()
                    optimizer.step()
        for epoch in range(2):
            for x in loader:
                model(x).mean().backward()
                optimizer.step()
        """,
    )
    assert "--array" in noticed(explanation.refused)[7]
    assert "second loop" in noticed(explanation.warnings)[12]
    assert (8, "model, optimizer, loader = elastic.prepare(model, optimizer, loader)") in changed(explanation)


def test_batches_that_are_cut_by_hand_are_refused(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        """\
        import torch

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):
            for start in range(0, len(X), 32):
                model(X[start : start + 32]).mean().backward()
                optimizer.step()
        """,
    )
    assert explanation.way == "prepare"
    assert "DataLoader" in noticed(explanation.refused)[6]


def test_two_loaders_at_once_are_a_warning(tmp_path: Path) -> None:
    text = loop().replace("enumerate(loader)", "zip(loader, loader_b)")
    assert "only one is prepared" in noticed(explain_text(tmp_path, text).warnings)[10]
