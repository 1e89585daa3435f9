"""Tune examples/digits.py: 50 trials of an Optuna study on whatever nodes the controller has, those at a time that fit.

bftrainer serve --nodes 4        (in another terminal)
python examples/tune_digits.py   (again, if it was interrupted: it goes on)
"""

import argparse
from pathlib import Path

import optuna

from bftrainer.hpo import optimize

parser = argparse.ArgumentParser(description="Tune the CNN on scikit-learn's digits.")
parser.add_argument("--trials", type=int, default=50, help="how many, those of earlier runs included")
parser.add_argument("--epochs", type=int, default=9, help="of each trial that is not pruned")
parser.add_argument("--nodes", default="1-2", metavar="A-B", help="for each trial")
parser.add_argument("--max-parallel", type=int, help="trials at once; else as many as the controller considers")
parser.add_argument("--storage", default="sqlite:///tune_digits.db", help="where Optuna keeps the study")
parser.add_argument("--study", default="digits", help="name of the study; a new name begins a new search")
parser.add_argument("--seed", type=int, help="of the sampler; for a study that is begun once and not interrupted")
parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="sleep after each batch")
args = parser.parse_args()


def space(trial: optuna.Trial) -> list[object]:
    """What a trial may choose, as arguments of digits.py."""
    lr = trial.suggest_float("lr", 1e-4, 3e-2, log=True)
    batch_size = trial.suggest_categorical("batch_size", [16, 32, 64, 128])
    return ["--epochs", args.epochs, "--pace", args.pace, "--lr", lr, "--batch-size", batch_size]


study = optuna.create_study(
    study_name=args.study,
    storage=args.storage,
    load_if_exists=True,
    direction="maximize",
    # Trials wait for nodes side by side, so the sampler should know which choices are being tried.
    sampler=optuna.samplers.TPESampler(constant_liar=True, seed=args.seed),
    pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=3, reduction_factor=3),
)
summary = optimize(
    study,
    Path(__file__).with_name("digits.py"),
    space,
    n_trials=args.trials,
    nodes=args.nodes,
    metric="accuracy",
    max_parallel=args.max_parallel,
)
best = study.best_trial
print(f"best trial: {best.number} with accuracy {best.value:.2%}, {best.params}")
print(summary)
