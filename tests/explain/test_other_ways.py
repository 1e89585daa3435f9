"""Scripts for torchrun, frameworks, scripts that use bftrainer already, and programs that do not train with PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from bftrainer.explain import what_keeps_from_place
from support.explained import after, changed, explain_text, noticed

DDP = """\
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
{wrap}
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
model.load_state_dict(torch.load("last.pt"))
best = 0.0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
    total = torch.tensor(evaluate(model))
    dist.all_reduce(total)
    best = max(best, total.item())
    if dist.get_rank() == 0:
        open("log", "a").write(str(best))
"""


def ddp(wrap: str = "", model: str = "DDP(torch.nn.Linear(1, 1))") -> str:
    return DDP.format(wrap=wrap, model=model)


def test_a_ddp_script_is_submitted_unchanged(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, ddp())
    assert explanation.way == "ddp"
    assert explanation.changes == ()
    assert explanation.notices == ()
    assert explanation.command == "bftrainer submit --launcher ddp --nodes 1-4 train.py"


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("    best = max(best", "    best = max(best", 0, ""),
        ("        optimizer.step()", "        optimizer.step()\n        steps += 1", 22, "`steps` counts batches"),
        ("sampler=sampler)", "shuffle=True)", 18, "no DistributedSampler"),
        ("best = 0.0", "best = 0.0; writer = SummaryWriter()", 15, "would log on every rank"),
        ("loss = model(x).mean()", "loss = model(x).sum()", 19, "the loss is a sum"),
    ],
)
def test_what_the_ddp_launcher_refuses_is_named_before_the_start(
    tmp_path: Path, old: str, new: str, line: int, said: str
) -> None:
    text = ddp().replace(old, new).replace("best = 0.0", "best = 0.0; steps = 0")
    text = text.replace("sampler = DistributedSampler(data)", "sampler = None") if "shuffle" in new else text
    explanation = explain_text(tmp_path, text)
    assert explanation.way == ("torchrun" if line else "ddp")
    refused = noticed(explanation.refused)
    assert list(refused) == ([line] if line else [])
    assert not line or said in refused[line]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("group = dist.new_group([0, 1])", "ranks that are fixed"),
        ("dist.send(tensor, dst=1)", "ranks that are fixed"),
        ("dist.recv(tensor, src=0)", "ranks that are fixed"),
        ("torch.distributed.rpc.init_rpc('a')", "remote calls"),
        ("mp.spawn(main, nprocs=4)", "LOCAL_RANK"),
        ("mesh = torch.distributed.device_mesh.init_device_mesh('cuda', (2, 4))", "another part of the model"),
        ("from torch.distributed.fsdp import fully_shard; fully_shard(net)", "lost with its node"),
        ("opt = torch.distributed.optim.ZeroRedundancyOptimizer(params, torch.optim.Adam)", "lost with its node"),
    ],
)
def test_what_cannot_be_stood_in_for_is_named_and_falls_back_to_torchrun(tmp_path: Path, line: str, said: str) -> None:
    explanation = explain_text(tmp_path, ddp(line))
    assert explanation.way == "torchrun"
    assert said in noticed(explanation.refused)[9]
    assert explanation.command == "bftrainer submit --launcher torchrun --nodes 1-4 train.py"


def test_fsdp_under_its_own_name_is_found(tmp_path: Path) -> None:
    text = ddp(model="FSDP(net)").replace(
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
    )
    assert 10 in noticed(explain_text(tmp_path, text).refused)


def test_a_torchrun_script_without_a_checkpoint_is_told_that_it_starts_over(tmp_path: Path) -> None:
    text = ddp("dist.send(tensor, 1)").replace('model.load_state_dict(torch.load("last.pt"))', "pass")
    assert any("no line was found that reads a checkpoint" in one.what for one in explain_text(tmp_path, text).warnings)
    with_one = explain_text(tmp_path, ddp("dist.send(tensor, 1)"))
    assert not any("no line was found" in one.what for one in with_one.warnings)


def test_an_own_socket_is_not_torch_s_send(tmp_path: Path) -> None:
    assert explain_text(tmp_path, ddp("sock.send(b'x'); queue.recv()")).refused == ()


OWN_BATCHES = """\
import os
import torch
from torch.distributed import init_process_group

ddp = int(os.environ.get("RANK", -1)) != -1
{group}
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for it in range(100):
    model(get_batch()).mean().backward()
    optimizer.step()
"""


def test_own_batches_with_an_optional_process_group_are_a_plain_loop(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, OWN_BATCHES.format(group="if ddp:\n    init_process_group()"))
    assert explanation.way == "prepare"
    assert "for it in elastic.steps(100):" in [text for _, text in changed(explanation)]
    assert "not used" in next(one.what for one in explanation.evidence if one.line == 7)


def test_own_batches_with_a_process_group_in_any_case_restart(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, OWN_BATCHES.format(group="init_process_group()"))
    assert explanation.way == "torchrun"
    assert "no DataLoader" in noticed(explanation.refused)[9]


# Frameworks.


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import transformers\nt = transformers.Trainer(model)\n", "t = bft.elastic(transformers.Trainer)(model)"),
        (
            "from transformers import Seq2SeqTrainer\nt = Seq2SeqTrainer(model)\n",
            "t = bft.elastic(Seq2SeqTrainer)(model)",
        ),
        ("from trl import SFTTrainer\nt = SFTTrainer(model)\n", "t = bft.elastic(SFTTrainer)(model)"),
        (
            "from transformers import Trainer\nclass Mine(Trainer):\n    pass\nt = Mine(model)\n",
            "t = bft.elastic(Mine)(model)",
        ),
    ],
)
def test_trainers_of_hugging_face_are_found_under_any_name(tmp_path: Path, text: str, line: str) -> None:
    explanation = explain_text(tmp_path, text)
    assert explanation.way == "transformers"
    assert changed(explanation)[-1][1] == line
    assert after(explanation, tmp_path)["train.py"][1] == "from bftrainer.integrations import transformers as bft"


def test_a_subclass_in_another_file_is_a_trainer(tmp_path: Path) -> None:
    mine = "from transformers import Trainer\nclass Mine(Trainer):\n    pass\n"
    explanation = explain_text(tmp_path, "from mine import Mine\nMine(model).train()\n", mine=mine)
    assert explanation.way == "transformers"
    assert changed(explanation)[-1] == (2, "bft.elastic(Mine)(model).train()")


def test_a_model_of_hugging_face_in_an_own_loop_is_a_plain_loop(tmp_path: Path) -> None:
    explanation = explain_text(
        tmp_path,
        """\
        import torch
        from transformers import AutoModel

        model = AutoModel.from_pretrained("x")
        optimizer = torch.optim.AdamW(model.parameters())
        loader = torch.utils.data.DataLoader(data)
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
        """,
    )
    assert explanation.way == "prepare"
    assert changed(explanation)[-1] == (7, "model, optimizer, loader = elastic.prepare(model, optimizer, loader)")


@pytest.mark.parametrize("option", ["deepspeed='ds.json'", "fsdp='full_shard'"])
def test_a_sharding_trainer_falls_back_to_torchrun(tmp_path: Path, option: str) -> None:
    imports = "from transformers import Trainer, TrainingArguments"
    explanation = explain_text(tmp_path, f"{imports}\na = TrainingArguments('o', {option})\nTrainer(m, a)\n")
    assert explanation.way == "torchrun"
    assert explanation.changes == ()
    assert 2 in noticed(explanation.refused)


def test_a_stream_for_a_trainer_is_refused(tmp_path: Path) -> None:
    text = "from transformers import Trainer\nd = load_dataset('c4', streaming=True)\nTrainer(m, train_dataset=d)\n"
    assert "stream" in noticed(explain_text(tmp_path, text).refused)[3]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "from accelerate import Accelerator\na = Accelerator()\n",
            [
                "from bftrainer.integrations.accelerate import ElasticAccelerator as Accelerator",
                "a = Accelerator()",
                "",
            ],
        ),
        (
            "def main():\n    from accelerate import Accelerator as Acc\n    a = Acc()\n",
            [
                "def main():",
                "    from bftrainer.integrations.accelerate import ElasticAccelerator as Acc",
                "    a = Acc()",
                "",
            ],
        ),
        (
            "import accelerate\na = accelerate.Accelerator(cpu=True)\n",
            [
                "import accelerate",
                "from bftrainer.integrations.accelerate import ElasticAccelerator as Accelerator",
                "a = Accelerator(cpu=True)",
                "",
            ],
        ),
    ],
)
def test_an_accelerator_is_replaced_however_it_is_imported(tmp_path: Path, text: str, wanted: list[str]) -> None:
    explanation = explain_text(tmp_path, text)
    assert explanation.way == "accelerate"
    assert after(explanation, tmp_path)["train.py"] == wanted


ACCELERATED = """\
from accelerate import Accelerator
from torch.utils.data import DataLoader

def main():
    accelerator = Accelerator()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    {values}
    for epoch in {epochs}:
        for x, y in loader:
            accelerator.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        error = evaluate(model)
        {judge}

main()
"""
JUDGE = """if error < best{v}:
            best{v} = error
            bad{v} = 0
        else:
            bad{v} += 1
            if bad{v} > 3:
                break"""


def test_an_accelerated_loop_that_keeps_values_counts_epochs_as_all_nodes_do(tmp_path: Path) -> None:
    text = ACCELERATED.format(values="best, bad = 9e9, 0", epochs="range(epochs)", judge=JUDGE.format(v=""))
    explanation = explain_text(tmp_path, text)
    found = after(explanation, tmp_path)["train.py"]
    assert "    for epoch in elastic.epochs(epochs):" in found
    assert "from bftrainer import elastic" in found
    assert "register_for_checkpointing" in noticed(explanation.warnings)[8]

    plain = explain_text(tmp_path, ACCELERATED.format(values="", epochs="range(epochs)", judge="print(error)"))
    assert "    for epoch in range(epochs):" in after(plain, tmp_path)["train.py"], "then range works"
    unknown = explain_text(tmp_path, text.replace("range(epochs)", "epochs"))
    assert "elastic.epochs" in noticed(unknown.warnings)[9]


@pytest.mark.parametrize(
    "values",
    ["best, bad = elastic.Value(9e9), elastic.Value(0)", "best = elastic.Value(9e9); bad = elastic.Value(0)"],
)
def test_an_elastic_accelerated_loop_that_keeps_values_is_told_to_count_so(tmp_path: Path, values: str) -> None:
    text = ACCELERATED.replace("    accelerator = Accelerator()", "    accelerator = bft.ElasticAccelerator()").replace(
        "from accelerate import Accelerator\n",
        "from bftrainer import elastic; from bftrainer.integrations import accelerate as bft\n",
    )
    judge = JUDGE.format(v=".value")
    told = explain_text(tmp_path, text.format(values=values, epochs="range(epochs)", judge=judge))
    assert told.way == "elastic"
    assert set(noticed(told.warnings)) == {9}
    assert "elastic.epochs" in noticed(told.warnings)[9]
    fine = explain_text(tmp_path, text.format(values=values, epochs="elastic.epochs(epochs)", judge=judge))
    assert fine.notices == ()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", "strategy=ElasticStrategy()"),
        ("max_epochs=3", "strategy=ElasticStrategy(), max_epochs=3"),
        ("strategy='ddp', max_epochs=3", "strategy=ElasticStrategy(), max_epochs=3"),
        ("devices=2, num_nodes=4, max_epochs=3", "strategy=ElasticStrategy(), max_epochs=3"),
        ("max_epochs=3, devices=2, strategy=args.strategy", "max_epochs=3, strategy=ElasticStrategy()"),
        ("devices=1, num_nodes=2", "devices=1, strategy=ElasticStrategy()"),
        ("num_nodes=2, devices='auto', strategy='auto'", "devices='auto', strategy=ElasticStrategy()"),
        ("max_epochs=3,\n    strategy='ddp',\n    devices=2,\n", "max_epochs=3,\n    strategy=ElasticStrategy(),\n"),
    ],
)
def test_a_lightning_trainer_gets_another_strategy(tmp_path: Path, given: str, wanted: str) -> None:
    explanation = explain_text(tmp_path, f"import pytorch_lightning as L\nL.Trainer({given})\n")
    assert explanation.way == "lightning"
    changed = "\n".join(after(explanation, tmp_path)["train.py"]).rstrip()
    assert changed.endswith(f"import ElasticStrategy\nL.Trainer({wanted})")
    assert explanation.refused == ()


@pytest.mark.parametrize("strategy", ["'fsdp'", "'deepspeed_stage_3'", "FSDPStrategy(cpu_offload=True)"])
def test_a_lightning_trainer_that_shards_its_model_restarts(tmp_path: Path, strategy: str) -> None:
    imports = "from lightning.pytorch import Trainer\nfrom lightning.pytorch.strategies import FSDPStrategy\n"
    text = f"{imports}Trainer(strategy={strategy})\n"
    explanation = explain_text(tmp_path, text)
    assert explanation.way == "torchrun"
    assert explanation.changes == ()
    assert "splits the model" in noticed(explanation.refused)[3]


def test_the_tuner_of_lightning_is_refused(tmp_path: Path) -> None:
    imports = "import lightning as L\nfrom lightning.pytorch.tuner import Tuner\n"
    text = f"{imports}trainer = L.Trainer()\nTuner(trainer).lr_find(model)\n"
    explanation = explain_text(tmp_path, text)
    assert explanation.way == "lightning"
    assert "one trainer per value" in explanation.refused[0].remedy


def test_fabric_restarts(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, "import lightning as L\nfabric = L.Fabric()\n")
    assert explanation.way == "torchrun"


# Already elastic.

RUN = """\
import torch
from bftrainer import elastic

run = elastic.init()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.register(model=model, optimizer=optimizer)
for epoch in {epochs}:
    for x in run.batches(data, batch_size=4):
        loss = model(x).mean()
        loss.backward()
        {step}
"""


def run_script(epochs: str = "run.epochs(3)", step: str = "run.step(loss=loss)") -> str:
    return RUN.format(epochs=epochs, step=step)


def test_an_elastic_script_has_nothing_to_change(tmp_path: Path) -> None:
    explanation = explain_text(tmp_path, run_script())
    assert explanation.way == "elastic"
    assert explanation.changes == ()
    assert explanation.notices == ()
    assert [one.line for one in explanation.evidence] == [4]


def test_an_elastic_loop_of_steps_has_nothing_to_change_either(tmp_path: Path) -> None:
    text = run_script().replace(
        "    for x in run.batches(data, batch_size=4):\n        loss", "    x = get_batch()\n    loss"
    )
    text = text.replace("run.epochs", "run.steps").replace("        ", "    ")
    assert explain_text(tmp_path, text).notices == ()


@pytest.mark.parametrize(
    ("parts", "line", "said"),
    [
        ({"step": "optimizer.step(); run.step(loss=loss)"}, 12, "run.step() steps the registered"),
        ({"step": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1); run.step()"}, 12, "clip_norm"),
        ({"epochs": "range(3)"}, 8, "run.epochs"),
    ],
)
def test_mistakes_of_elastic_scripts_are_refused(tmp_path: Path, parts: dict[str, str], line: int, said: str) -> None:
    assert said in noticed(explain_text(tmp_path, run_script(**parts)).refused)[line]


def test_a_process_group_in_an_elastic_script_is_refused(tmp_path: Path) -> None:
    text = run_script().replace("run = elastic", "torch.distributed.init_process_group()\nrun = elastic")
    assert "remove it" in noticed(explain_text(tmp_path, text).refused)[4]


PREPARED = """\
import torch
from torch.utils.data import DataLoader
from bftrainer import elastic

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
loader = DataLoader(data)
{prepare}
for epoch in elastic.epochs(3):
    for x in loader:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_a_prepared_script_has_nothing_to_change(tmp_path: Path) -> None:
    line = "model, optimizer, loader, scaler = elastic.prepare(model, optimizer, loader, scaler)"
    explanation = explain_text(tmp_path, PREPARED.format(prepare=line))
    assert explanation.way == "elastic"
    assert explanation.notices == ()


def test_objects_in_a_list_may_be_prepared(tmp_path: Path) -> None:
    line = "objects = [model, optimizer, loader, scaler]\nmodel, optimizer, loader, scaler = elastic.prepare(*objects)"
    assert explain_text(tmp_path, PREPARED.format(prepare=line)).refused == ()


def test_an_object_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    line = "model, optimizer, loader = elastic.prepare(model, optimizer, loader)"
    assert (
        "give scaler to elastic.prepare" in noticed(explain_text(tmp_path, PREPARED.format(prepare=line)).refused)[12]
    )


def test_a_prepared_script_with_a_run_has_nothing_to_change_either(tmp_path: Path) -> None:
    line = "run = elastic.init()\nmodel, optimizer, loader, scaler = run.prepare(model, optimizer, loader, scaler)"
    explanation = explain_text(tmp_path, PREPARED.format(prepare=line))
    assert explanation.way == "elastic"
    assert explanation.notices == ()


def test_a_loop_of_a_prepared_script_over_range_is_advised_to_change(tmp_path: Path) -> None:
    line = "model, optimizer, loader, scaler = elastic.prepare(model, optimizer, loader, scaler)"
    explanation = explain_text(tmp_path, PREPARED.format(prepare=line).replace("elastic.epochs(3)", "range(3)"))
    assert "elastic.epochs(…)" in noticed(explanation.warnings)[10]
    assert explanation.refused == ()


def test_a_sampler_is_refused_by_run_batches(tmp_path: Path) -> None:
    text = run_script().replace("run.batches(data, batch_size=4)", "run.batches(loader)")
    loader = "from torch.utils.data import DataLoader\nloader = DataLoader(data, sampler=Mine(data))\nrun = elastic"
    assert (
        "run.batches must decide" in noticed(explain_text(tmp_path, text.replace("run = elastic", loader)).refused)[5]
    )


def test_a_prepared_loader_that_is_not_used_is_refused(tmp_path: Path) -> None:
    text = PREPARED.format(prepare="elastic.prepare(model, optimizer, loader, scaler)")
    assert "assign them: model, optimizer, loader, scaler =" in noticed(explain_text(tmp_path, text).refused)[9]


def test_an_integration_that_is_imported_only_is_told(tmp_path: Path) -> None:
    text = "import lightning as L\nfrom bftrainer.integrations.lightning import ElasticStrategy\nL.Trainer()\n"
    explanation = explain_text(tmp_path, text)
    assert explanation.way == "elastic"
    assert "not used" in noticed(explanation.warnings)[2]


# Neither.


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("import tensorflow as tf\nmodel.fit(x)\n", 1, "TensorFlow"),
        ("import os\nfrom jax import numpy\n", 2, "JAX"),
        ("from sklearn.svm import SVC\nSVC().fit(x, y)\n", 1, "scikit-learn"),
        ("import subprocess\nsubprocess.run(['torchrun', 'train2.py'])\n", 2, "submit the script that trains"),
        ("import torch\nmodel = torch.load('m.pt')\nprint(model(x))\n", 1, "membership"),
        ("", 1, "no line computes gradients"),
    ],
)
def test_other_programs_have_no_way_and_are_told_what_is_possible(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    explanation = explain_text(tmp_path, text)
    assert explanation.way == "none"
    assert explanation.command == ""
    assert explanation.changes == ()
    assert said in noticed(explanation.warnings)[line]


IN_PLACE = DDP.replace("{wrap}", "").replace("{model}", "DDP(torch.nn.Linear(4, 1))")


@pytest.mark.parametrize(
    "line",
    [
        "mine = data[rank::world]",
        "part = range(rank * 8, (rank + 1) * 8)",
        "part = torch.arange(rank, 64, world)",
        "own = [i for i in order if i % world == dist.get_rank() % 2]",
    ],
)
def test_data_chosen_by_the_rank_keeps_a_script_from_training_in_place(line: str, tmp_path: Path) -> None:
    assert explain_text(tmp_path, IN_PLACE).way == "ddp"
    found = explain_text(tmp_path, f"{IN_PLACE}rank, world = dist.get_rank(), dist.get_world_size()\n{line}\n")
    assert found.way == "torchrun"
    assert any("chooses data by the rank" in one.what for one in found.notices if one.refused)


SHARE = "class Share(torch.utils.data.Dataset):\n    def __init__(self, size, part=0, device=None):\n        pass\n\n"


@pytest.mark.parametrize(
    ("made", "way"),
    [
        ("Share(64, dist.get_rank())", "torchrun"),
        ("Share(64, part=rank)", "torchrun"),
        ("Share(64, device=rank)", "ddp"),
        ("Share(64, device=torch.device('cuda', rank))", "ddp"),
        ("Share(64, 0, f'cuda:{rank}')", "ddp"),
        ("dict(part=rank)", "ddp"),
    ],
)
def test_a_dataset_made_by_the_rank_keeps_a_script_from_training_in_place(made: str, way: str, tmp_path: Path) -> None:
    found = explain_text(tmp_path, f"{IN_PLACE}{SHARE}rank = dist.get_rank()\ndata = {made}\n")
    assert found.way == way, found.notices


def test_a_rank_for_devices_and_for_the_main_rank_keeps_no_script_from_training_in_place(tmp_path: Path) -> None:
    more = "rank = dist.get_rank()\ngpu = rank % torch.cuda.device_count()\nif rank == 0:\n    print(f'cuda:{rank}')\n"
    assert explain_text(tmp_path, IN_PLACE + more).way == "ddp"


def test_an_average_in_a_class_of_its_own_keeps_a_script_from_training_in_place(tmp_path: Path) -> None:
    own = "class Shadow:\n    def update(self, m):\n        self.kept = m\n\nshadow = Shadow()\n"
    text = IN_PLACE.replace("best = 0.0\n", f"best = 0.0\n{own}")
    assert explain_text(tmp_path, text).way == "ddp"
    found = explain_text(
        tmp_path, text.replace("        optimizer.step()\n", "        optimizer.step()\n        shadow.update(model)\n")
    )
    assert found.way == "torchrun"
    assert any("`shadow` is updated from the model in each batch" in one.what for one in found.notices)


def test_accumulation_keeps_a_script_from_its_place_only_if_its_ranks_may_be_fewer(tmp_path: Path) -> None:
    text = ddp().replace("for x in loader:", "for i, x in enumerate(loader):")
    step = "        optimizer.step()"
    text = text.replace(step, f"        if (i + 1) % 4 == 0 or i + 1 == len(loader):\n    {step}")
    for fewer_ranks, script, line in [(True, ddp(), None), (False, text, None), (True, text, 21)]:
        (tmp_path / "train.py").write_text(script)
        found = what_keeps_from_place(["train.py"], tmp_path, fewer_ranks=fewer_ranks)
        assert (found and found.line) == line
        assert found is None or ("fewer ranks than the script sees" in found.what and "--ranks" in found.remedy)
