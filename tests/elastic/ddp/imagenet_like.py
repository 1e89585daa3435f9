"""A script for torchrun in the shape of PyTorch's ImageNet example.

It has a warm-up schedule, a validation set that is split over the ranks, meters that are reduced, a best checkpoint,
early stopping and resuming. `imagenet_like.py FOLDER EPOCHS`. It knows nothing of BFTrainer.
"""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("epochs", type=int)
parser.add_argument("--batch-size", type=int, default=24, help="of all GPUs together")
parser.add_argument("--lr", type=float, default=0.01, help="for one GPU")
parser.add_argument("--resume", action="store_true")
best_acc1 = 0.0
patience = 0


def main():
    global best_acc1, patience
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    args.batch_size = int(args.batch_size / args.world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 3)).double()
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr * args.world_size, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.7)
    plateau = ReduceLROnPlateau(optimizer, patience=2, factor=0.5)
    start_epoch = 0
    checkpoint_path = os.path.join(args.folder, "checkpoint.pt")
    if args.resume and os.path.isfile(checkpoint_path):
        checkpoint = torch.load(checkpoint_path)
        start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    train_dataset, val_dataset = make_data(600, 1), make_data(180, 2)
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, batch_size=args.batch_size, shuffle=False, sampler=val_sampler)
    history = []
    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1, loss = validate(val_loader, model, criterion, args)
        scheduler.step()
        plateau.step(loss)
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        patience = 0 if is_best else patience + 1
        history.append((acc1, loss))
        if args.rank == 0:
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
                args,
            )
            with open(os.path.join(args.folder, "log.txt"), "a") as log:
                log.write(f"{epoch} {acc1:.12f} {loss:.12f}\n")
        if patience > 30:
            break
    if args.rank == 0:
        torch.save(
            {
                "model": model.state_dict(),
                "best": best_acc1,
                "patience": patience,
                "loss": loss,
                "lr": optimizer.param_groups[0]["lr"],
                "history": [value for pair in history for value in pair],
            },
            os.path.join(args.folder, "model.pt"),
        )
    dist.destroy_process_group()


def make_data(count, seed):
    data = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 20, generator=data, dtype=torch.float64)
    rule = torch.randn(20, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    noise = 3 * torch.randn(count, 3, generator=data, dtype=torch.float64)
    return TensorDataset(inputs, (inputs @ rule + noise).argmax(1))


def train(loader, model, criterion, optimizer, epoch, args):
    losses = AverageMeter("Loss")
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown = reduce_mean(loss.detach(), args.world_size)
        losses.update(shown.item(), images.size(0))
        if i % 10 == 0 and args.rank == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] Loss {losses.avg:.4f}")
    return losses.avg


def validate(loader, model, criterion, args):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    mean_loss = 0.0
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            top1.update((output.argmax(1) == target).double().mean().item() * 100, images.size(0))
            mean_loss += reduce_mean(loss, args.world_size).item()
    losses.all_reduce()
    top1.all_reduce()
    assert top1.count == len(loader.dataset), (top1.count, len(loader.dataset))
    assert abs(mean_loss / len(loader) - losses.avg) < 0.1, (mean_loss / len(loader), losses.avg)
    return top1.avg, mean_loss / len(loader)


def reduce_mean(tensor, nprocs):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= nprocs
    return rt


def save_checkpoint(state, is_best, args):
    filename = os.path.join(args.folder, "checkpoint.pt")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(args.folder, "model_best.pt"))


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.val = self.avg = self.sum = self.count = 0.0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count


if __name__ == "__main__":
    main()
