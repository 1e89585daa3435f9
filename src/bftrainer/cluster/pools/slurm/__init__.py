"""The Slurm pool runs pilot jobs on idle nodes, given back as soon as another job could use them."""
