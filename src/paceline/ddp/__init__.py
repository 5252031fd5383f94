""":class:`DistributedDataParallel` and its parts, and the names that code written for torch's class uses."""
