"""How other libraries load what we write."""
