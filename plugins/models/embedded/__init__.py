"""The tiny chat model that ships in the package."""
