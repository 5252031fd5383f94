"""The process group that c10d calls: it checks and packs tensors, starts a collective and hands out its work."""
