"""Managing of workers, on one machine (`elastic.local`) and by the agents of a cluster (`cluster.agent`)."""
