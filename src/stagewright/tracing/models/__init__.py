"""Models from a user's MODEL argument: `reference` resolves it without torch, `build` builds it."""
