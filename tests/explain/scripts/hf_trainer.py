from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)


def main():
    dataset = load_dataset("imdb")
    tokenizer = AutoTokenizer.from_pretrained("distilbert-base-uncased")
    tokenized = dataset.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=2)
    arguments = TrainingArguments(output_dir="out", num_train_epochs=3, gradient_accumulation_steps=2)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["test"],
    )
    trainer.train()
    trainer.save_model("final")


if __name__ == "__main__":
    main()
