"""Reports describe usage, lost samples and efficiency of a live run."""
