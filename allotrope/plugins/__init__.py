"""Other engines that run Allotrope's models: one folder per host. None of them is needed by anything else."""
