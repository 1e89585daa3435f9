"""The tracking package writes metrics to TensorBoard, W&B or MLflow as one run, whichever rank is the main one."""
