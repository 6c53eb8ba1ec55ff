"""From a model, a cluster and a job to widths of every kind of parallelism, and to the place of every rank."""
