"""Scripts in the shape of well-known examples: the way, the changed lines and the notices of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bftrainer.explain import Explanation, explain
from support.explained import SCRIPTS, after, changed, explain_script, noticed

ROOT = Path(__file__).resolve().parents[2]


def checked(name: str) -> Explanation:
    """The explanation of a script, whose changes are valid Python."""
    explanation = explain_script(name)
    after(explanation, SCRIPTS)
    return explanation


def test_mnist_needs_three_lines() -> None:
    explanation = checked("mnist.py")
    assert explanation.way == "prepare"
    assert changed(explanation) == [
        (8, "from bftrainer import elastic"),
        (58, "model, optimizer, train_loader, scheduler = elastic.prepare(model, optimizer, train_loader, scheduler)"),
        (58, "for epoch in elastic.epochs(1, args.epochs + 1):"),
    ]
    assert explanation.refused == ()  # the summed loss of its evaluation is not trained on
    assert explanation.warnings == ()
    assert {one.line for one in explanation.evidence} == {22, 26, 27, 58}
    assert explanation.command == "bftrainer submit --nodes 1-4 mnist.py"


def test_both_summed_parts_of_a_vae_s_loss_are_refused() -> None:
    explanation = checked("vae.py")
    assert explanation.way == "prepare"
    assert changed(explanation) == [
        (6, "from bftrainer import elastic"),
        (47, "model, optimizer, train_loader = elastic.prepare(model, optimizer, train_loader)"),
        (47, "for epoch in elastic.epochs(1, 11):"),
    ]
    assert set(noticed(explanation.refused)) == {28, 29}
    assert all("must be a mean" in said for said in noticed(explanation.refused).values())
    assert "written by all ranks" in noticed(explanation.warnings)[51]


def test_both_networks_and_optimizers_of_a_gan_are_prepared() -> None:
    explanation = checked("gan.py")
    assert explanation.way == "prepare"
    assert changed(explanation)[1] == (
        16,
        "netD, netG, optimizerD, optimizerG, dataloader = elastic.prepare("
        "netD, netG, optimizerD, optimizerG, dataloader)",
    )
    assert explanation.refused == ()
    warnings = noticed(explanation.warnings)
    assert set(warnings) == {13, 14}
    assert "it seems to differ by rank" in warnings[13]  # the loss of a batch


def test_an_iteration_loop_becomes_steps_and_micro_steps() -> None:
    explanation = checked("chars.py")
    assert explanation.way == "prepare"
    assert changed(explanation) == [
        (8, "from bftrainer import elastic"),
        (56, 'model, optimizer, scaler = elastic.prepare(model, optimizer, scaler, carry="best_val_loss")'),
        (56, "for iter_num in elastic.steps(max_iters + 1):"),
        (64, "for micro_step in elastic.micro_steps(gradient_accumulation_steps):"),
        (78, None),
        (81, None),
        (82, None),
    ]
    assert explanation.refused == ()
    warnings = noticed(explanation.warnings)
    assert set(warnings) == {16, 55, 67}  # 16: `ignore_index`
    assert "in the pass that computes it" in warnings[67]
    assert "it seems to differ by rank" in warnings[55]  # it comes from a clock


def test_imagenet_keeps_its_resume_code_and_its_best_accuracy_is_carried() -> None:
    explanation = checked("imagenet.py")
    assert explanation.way == "prepare"
    assert [line for line, _ in changed(explanation)] == [11, 38, 38]
    assert 'scheduler, carry="best_acc1")' in str(changed(explanation)[1][1])
    assert explanation.refused == ()
    warnings = noticed(explanation.warnings)
    assert set(warnings) == {29, 66}
    assert "elastic.is_main()" in warnings[66]  # of shutil.copyfile
    assert "harmless" in warnings[29]


def test_accumulation_gets_a_step_at_the_end_of_an_epoch() -> None:
    explanation = checked("amp_accumulate.py")
    assert explanation.way == "prepare"
    assert changed(explanation) == [
        (5, "from bftrainer import elastic"),
        (
            19,
            "model, opt, train_dl, sched, scaler = elastic.prepare("
            'model, opt, train_dl, sched, scaler, carry=("best_val", "patience"))',
        ),
        (19, "for epoch in tqdm(elastic.epochs(10)):"),
        (28, "if (i + 1) % ACCUMULATE == 0 or i + 1 == len(train_dl):"),
    ]
    assert set(noticed(explanation.refused)) == {28}
    warnings = noticed(explanation.warnings)
    assert set(warnings) == {17, 28, 48}
    assert "accumulate=ACCUMULATE" in warnings[28]
    assert "it seems to differ by rank" in warnings[17]  # the history has the sum of this rank's losses


def test_phases_share_a_loop_and_the_training_loader_is_prepared() -> None:
    explanation = checked("transfer.py")
    assert changed(explanation)[1] == (
        16,
        'model, optimizer, dataloaders["train"], scheduler = '
        'elastic.prepare(model, optimizer, dataloaders["train"], scheduler)',
    )
    warnings = noticed(explanation.warnings)
    assert "torch.save" in warnings[14]  # weights do not fit into a value
    assert "elastic.Value(0.0)" in warnings[15]


def test_objects_of_a_class_keep_their_self() -> None:
    explanation = checked("trainer_class.py")
    assert changed(explanation)[1] == (
        16,
        "model, self.optimizer, self.train_loader = elastic.prepare(model, self.optimizer, self.train_loader)",
    )
    assert "self.best_loss" in noticed(explanation.warnings)[9]


def test_the_loop_may_be_in_another_file() -> None:
    explanation = checked("split/train.py")
    assert explanation.way == "prepare"
    assert {change.file for change in explanation.changes} == {"split/engine.py"}
    assert changed(explanation) == [
        (2, "from bftrainer import elastic"),
        (21, "net, opt, loader, sched = elastic.prepare(net, opt, loader, sched)"),
        (21, "for epoch in elastic.epochs(epochs):"),
    ]
    assert {(one.file, one.line) for one in explanation.warnings} == {("split/engine.py", 20)}
    assert len(explanation.warnings) == 2


def test_a_torchrun_script_stays_as_it_is() -> None:
    explanation = checked("torchrun_tutorial.py")
    assert explanation.way == "ddp"
    assert explanation.changes == ()
    assert explanation.refused == ()
    assert {one.line for one in explanation.evidence} == {13, 14, 23, 59, 63}
    assert explanation.command == "bftrainer submit --launcher ddp --nodes 1-4 torchrun_tutorial.py"


def test_a_hugging_face_trainer_needs_two_lines() -> None:
    explanation = checked("hf_trainer.py")
    assert explanation.way == "transformers"
    assert changed(explanation) == [
        (8, "from bftrainer.integrations import transformers as bft"),
        (16, "trainer = bft.elastic(Trainer)("),
    ]
    assert explanation.notices == ()


def test_accelerate_needs_another_import_and_elastic_epochs_where_values_are_kept() -> None:
    explanation = checked("accelerate_loop.py")
    assert explanation.way == "accelerate"
    assert changed(explanation) == [
        (2, "from accelerate import DistributedType"),
        (2, "from bftrainer.integrations.accelerate import ElasticAccelerator as Accelerator"),
        (2, None),
        (6, "from bftrainer import elastic"),
        (19, "for epoch in elastic.epochs(3):"),
    ]
    assert explanation.refused == ()
    assert set(noticed(explanation.warnings)) == {18}


def test_lightning_gets_another_strategy() -> None:
    explanation = checked("lightning_module.py")
    assert explanation.way == "lightning"
    assert [(one.line, one.after) for one in explanation.changes] == [
        (6, "from bftrainer.integrations.lightning import ElasticStrategy"),
        (25, '    trainer = L.Trainer(max_epochs=3, accelerator="auto", strategy=ElasticStrategy())'),
    ]
    assert explanation.refused == ()


@pytest.mark.parametrize("name", ["digits", "chars", "images", "resnet", "power_iteration"])
def test_the_examples_of_the_project_are_elastic_and_nothing_in_them_is_refused(name: str) -> None:
    explanation = explain([f"{name}.py"], ROOT / "examples")
    assert explanation.way == "elastic"
    assert explanation.refused == ()


@pytest.mark.parametrize("name", ["mnist_like", "vae_like", "gan_like", "imagenet_like", "nanogpt_like", "features"])
def test_nothing_is_refused_in_prepared_scripts_that_run(name: str) -> None:
    explanation = explain([f"{name}.py"], ROOT / "tests" / "elastic" / "prepared")
    assert explanation.way == "elastic"
    assert explanation.refused == ()


@pytest.mark.waits
@pytest.mark.parametrize("words", [["mnist.py", "--epochs", "1"], ["gan.py"]], ids=lambda words: words[0])
def test_a_script_with_its_changes_trains(tmp_path: Path, words: list[str]) -> None:
    changed_lines = after(explain_script(words[0]), SCRIPTS)[words[0]]
    (tmp_path / words[0]).write_text("\n".join(changed_lines))
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
