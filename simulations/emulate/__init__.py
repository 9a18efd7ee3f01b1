"""An Internet on one machine: a network namespace a site, real kernels' TCP, links as told."""
