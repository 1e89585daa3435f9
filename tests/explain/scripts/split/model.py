import torch
from torch import nn
from torch.nn import functional as F


class GPT(nn.Module):
    def __init__(self, block_size):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.head = nn.Linear(32, 256)

    def forward(self, idx, targets=None):
        logits = self.head(self.embed(idx))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
