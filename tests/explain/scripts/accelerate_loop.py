import torch
from accelerate import Accelerator, DistributedType
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup


def training_function(config, dataset, eval_dataset):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    train_dataloader = DataLoader(dataset, shuffle=True, batch_size=16)
    eval_dataloader = DataLoader(eval_dataset, batch_size=32)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 100, len(train_dataloader) * 3)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    best = 0.0
    for epoch in range(3):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += (predictions == references).sum().item()
        best = max(best, right)
        if accelerator.distributed_type == DistributedType.NO:
            accelerator.print(f"epoch {epoch}: {right}, best {best}")
