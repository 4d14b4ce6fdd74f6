"""A classifier whose neurons sit on the image's grid and read 8 of their neighbours each. Needs scikit-learn."""

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sparsecomp.nn import GeoSparseClassifier, count_params, match_dense

x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
net = GeoSparseClassifier(shape=(8, 8), k=8, hidden_layers=2, epochs=30, lr=1e-2, random_state=0)
accuracy = make_pipeline(StandardScaler(), net).fit(x, y).score(x_test, y_test)
parameters = count_params(net.net_)
print(f"{parameters:,} parameters, accuracy {accuracy:.1%}; dense: {match_dense(parameters, 64, 10)}")
assert accuracy > 0.93
