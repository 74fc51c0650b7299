"""Models for other libraries: merged or averaged weights, with a model card and a Modelfile."""
