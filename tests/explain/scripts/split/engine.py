import torch


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch):
    model.train()
    for image, target in data_loader:
        loss = criterion(model(image.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.inference_mode()
def evaluate(model, criterion, data_loader, device):
    model.eval()
    return sum(criterion(model(image.to(device)), target.to(device)).item() for image, target in data_loader)


def fit(net, loader, opt, sched, epochs, device):
    best_loss, waited = float("inf"), 0
    for epoch in range(epochs):
        train_one_epoch(net, torch.nn.CrossEntropyLoss(), opt, loader, device, epoch)
        sched.step()
        loss = evaluate(net, torch.nn.CrossEntropyLoss(), loader, device)
        if loss < best_loss:
            best_loss, waited = loss, 0
        else:
            waited += 1
        if waited > 3:
            break
