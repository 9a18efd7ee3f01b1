"""What a run would do elsewhere: emulated networks for real processes."""
