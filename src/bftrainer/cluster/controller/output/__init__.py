"""The output of trainers' workers: their logs, the budget for them, and the thread that writes them."""
