"""How fast: each operation's definition in plain PyTorch (`reference`), and how codes lie in memory (`packing`)."""
