"""The controller tracks nodes and trainers, assigns nodes to trainers, and gives orders to the agents."""
