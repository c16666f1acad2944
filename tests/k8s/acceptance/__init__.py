"""The steps of tests/k8s/accept.py on a cluster, by concept."""
