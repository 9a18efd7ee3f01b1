"""A laboratory: islands in one process, real gradients over a virtual network."""
