"""Lower bounds on the seconds and bytes of configurations, from the costs of their layers."""
