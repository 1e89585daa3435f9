"""PyTorch support for elastic training: the `Run` that `bftrainer.elastic.init()` returns, and its parts."""
