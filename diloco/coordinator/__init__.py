"""Control plane of a run: membership, grants, plan, journal. Carries no tensors."""
