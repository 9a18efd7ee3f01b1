"""DiLoCo in other trainers; one module for each, imported only where that trainer is installed."""
