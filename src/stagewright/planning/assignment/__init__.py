"""Which physical devices take which places of a configuration, by their kinds and by the links as they were measured."""
