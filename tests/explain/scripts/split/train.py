import torch
from engine import fit
from model import GPT
from torch.utils.data import DataLoader, TensorDataset


def main():
    dataset = TensorDataset(torch.randint(256, (64, 8)), torch.randint(256, (64, 8)))
    net = GPT(8)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    fit(net, DataLoader(dataset, batch_size=8, shuffle=True), opt, sched, 5, "cpu")


main()
