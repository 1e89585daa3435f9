"""A newcomer follows the training before it joins: the state flows to it while the others train on."""
