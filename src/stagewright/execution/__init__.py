"""Programs run on torch.distributed: transport, optimizer, checkpoints and measurement."""
