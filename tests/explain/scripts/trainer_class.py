import torch
from torch.utils.data import DataLoader


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.best_loss = float("inf")
        self.optimizer = None
        self.train_loader = DataLoader(train_dataset, shuffle=True, batch_size=config.batch_size)

    def run(self):
        model = self.model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.config.learning_rate)
        for epoch in range(self.config.max_epochs):
            for batch in self.train_loader:
                loss = self.training_step(batch)
                if loss < self.best_loss:
                    self.best_loss = loss

    def training_step(self, batch):
        x, y = batch
        _, loss = self.model(x, y)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.optimizer.step()
        return loss.item()
