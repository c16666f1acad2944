"""What tests/k8s/accept.py does to a cluster, by concept."""
