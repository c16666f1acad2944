"""Training by many ranks: against TorchRec, and how what it costs grows with the ranks."""
