import argparse
import os
import shutil

import torch
import torchvision.models as models
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision import datasets

best_acc1 = 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("--start-epoch", default=0, type=int)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    global best_acc1

    model = models.__dict__["resnet18"]()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    if args.resume:
        checkpoint = torch.load(args.resume)
        args.start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    train_loader = DataLoader(datasets.ImageFolder(os.path.join(args.data, "train")), batch_size=256, shuffle=True)
    val_loader = DataLoader(datasets.ImageFolder(os.path.join(args.data, "val")), batch_size=256)

    for epoch in range(args.start_epoch, args.epochs):
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        save_checkpoint({"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1}, is_best)


def train(train_loader, model, criterion, optimizer, epoch):
    for i, (images, target) in enumerate(train_loader):
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            print(epoch, i, loss.item())


@torch.no_grad()
def validate(val_loader, model):
    right = sum((model(images).argmax(1) == target).sum().item() for images, target in val_loader)
    return 100 * right / len(val_loader.dataset)


def save_checkpoint(state, is_best):
    torch.save(state, "checkpoint.pth.tar")
    if is_best:
        shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")


if __name__ == "__main__":
    main()
