"""Where peers meet: memory of every rank that its group can read and write."""
