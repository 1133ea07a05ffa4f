"""Loss functions of a linear model, whose gradients `by_hand` has."""

import jax.numpy as jnp

import pipejax as pj

INPUTS, OUTPUTS = 64, 65


def plain_loss(params, batch):
    errors = batch["x"] @ params["w"] + params["b"][None] - batch["y"]
    return (errors**2).mean()


def full_loss(params, batch, model_state, *, weighted):
    """Returns a loss for examples to keep, and everything that a loss can return."""
    keep = batch["keep"][:, None]
    inputs = batch["x"] - model_state["mean"][None]
    predictions = inputs @ params["w"]
    errors = predictions + params["b"][None] + model_state["last"] - batch["y"]
    weight = batch["keep"].sum()
    entries = jnp.maximum(weight, 1) * OUTPUTS
    new = model_state | {
        "mean": 0.5 * model_state["mean"] + 0.5 * batch["x"].mean(axis=0),
        "last": predictions.mean(),
    }
    if "seen" in new:
        new["seen"] += 1
    aux = pj.Aux(model_state=new)
    if weighted:
        aux = aux._replace(
            weight=weight, metrics={"error": (keep * errors).sum() / entries}
        )
    return (keep * errors**2).sum() / entries, aux


def loss_of(setting):
    """Returns a loss function in the simplest form that the setting allows."""
    weighted = setting.weighted

    def stateful(params, batch, *, model_state):
        return full_loss(params, batch, model_state, weighted=weighted)

    def stateless(params, batch):
        nothing = {"mean": jnp.zeros(INPUTS), "last": jnp.float32(0)}
        loss, aux = full_loss(params, batch, nothing, weighted=weighted)
        return loss, aux._replace(model_state=None)

    if setting.stateful:
        return stateful
    return stateless if weighted else plain_loss
