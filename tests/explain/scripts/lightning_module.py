import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(28 * 28, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    loader = DataLoader(TensorDataset(torch.rand(512, 784), torch.randint(10, (512,))), batch_size=32)
    trainer = L.Trainer(max_epochs=3, accelerator="auto", devices=4)
    trainer.fit(LitClassifier(), loader)


if __name__ == "__main__":
    main()
