"""Scikit-learn estimators: the paper's classifier, and trust for any other classifier (extra ``sklearn``)."""
