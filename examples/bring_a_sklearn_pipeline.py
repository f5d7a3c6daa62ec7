"""Take a fitted scikit-learn pipeline, and compare its answers with those of its MLP; then train the same in gigamlp.

Run with `python examples/bring_a_sklearn_pipeline.py`. Needs `gigamlp[torch,sklearn]`.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import gigamlp as gm


def main(device: str = "auto", hidden: int = 64) -> tuple[float, float]:
    """Return the accuracies of the pipeline's MLP, and of a GigaMLPClassifier on the same rows."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=0)
    pipeline = make_pipeline(StandardScaler(), MLPClassifier((hidden,), max_iter=50, random_state=0))
    pipeline.fit(x_train, y_train)

    mlp = gm.from_sklearn(pipeline)  # the scaler becomes the MLP's input scale and offset
    with gm.Session(mlp, device=device) as session:
        answers = session.predict(x_test)
        proba = session.predict_proba(x_test)
    print(f"{np.sum(answers != pipeline.predict(x_test))} of {len(x_test)} classes differ from the pipeline's")
    print(f"largest difference of a probability: {np.abs(proba - pipeline.predict_proba(x_test)).max():.1e}")

    own = gm.GigaMLPClassifier(hidden=hidden, device=device, random_state=0)
    accuracy = own.fit(x_train, y_train).score(x_test, y_test)
    print(f"accuracy: {np.mean(answers == y_test):.4f}, of a GigaMLPClassifier: {accuracy:.4f}")
    return float(np.mean(answers == y_test)), accuracy


if __name__ == "__main__":
    main()
