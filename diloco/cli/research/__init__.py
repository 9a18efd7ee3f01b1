"""Commands that simulate, measure and break."""
