"""`python -m bftrainer.cluster.agent` runs the agent of one node."""

from bftrainer.cluster.agent.agent import main

if __name__ == "__main__":
    main()
