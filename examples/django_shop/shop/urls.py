from django.contrib import admin
from django.urls import path
from orders import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders", views.place),
    path("orders/fail", views.fail),
    path("orders/<int:number>", views.show),
    path("orders/<int:number>/pay", views.pay),
]
