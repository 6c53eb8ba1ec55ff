"""From a user's MODEL argument to a model: `reference` resolves it without torch, `build` builds it."""
