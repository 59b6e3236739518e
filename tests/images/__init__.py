"""The images of ``docker/``, built and run without a container engine."""
