import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F
from torchvision.utils import save_image

device = torch.device("cpu")
train_loader = torch.utils.data.DataLoader(torch.rand(512, 784), batch_size=128, shuffle=True)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(784, 40)
        self.decode = nn.Linear(20, 784)

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784)).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.decode(z)), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def train(epoch):
    model.train()
    train_loss = 0
    for data in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data.to(device))
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"epoch {epoch} average loss {train_loss / len(train_loader.dataset):.4f}")


if __name__ == "__main__":
    for epoch in range(1, 11):
        train(epoch)
        with torch.no_grad():
            sample = model.decode(torch.randn(64, 20))
            save_image(sample.view(64, 1, 28, 28), f"sample_{epoch}.png")
