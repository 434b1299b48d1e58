"""The manifests that come with the package."""
