"""What Slurm, Kubernetes and SkyPilot run: a job for the coordinator, and one for each island."""
